"""Mutants of the Ray engine."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PARTS, GROUPS = "engines/test_ray_parts.py", "engines/test_ray.py"

# fmt: off
RAY = (
    Mutant("joined-rows-in-the-order-of-senders", "engines/ray/transport.py",
           "order = whole.key.argsort()",
           "order = torch.arange(len(whole.key))",
           (f"{PARTS}::test_every_taker_gets_its_rows_in_their_order_and_no_others",)),
    Mutant("takers-get-all-rows", "engines/ray/transport.py",
           "(mine % takers == taker)",
           "(mine % takers >= 0)",
           (f"{PARTS}::test_every_taker_gets_its_rows_in_their_order_and_no_others",)),
    Mutant("records-may-carry-a-graph", "engines/ray/transport.py",
           "assert_detached(record, type(record).__name__)",
           "assert_detached(None, type(record).__name__)",
           (f"{PARTS}::test_a_record_with_a_graph_is_refused",)),
    Mutant("rows-of-another-batch", "engines/process.py",
           "if not torch.equal(other.key, batch.key):",
           "if len(other.key) != len(batch.key):",
           (f"{PARTS}::test_a_record_of_other_rows_is_refused",)),
    Mutant("first-rollout-for-all", "engines/ray/schedule.py",
           "latest[phase.gives] = index",
           "latest.setdefault(phase.gives, index)",
           (f"{PARTS}::test_records_that_another_group_takes_are_those_of_the_phase_before",)),
    Mutant("what-takes-may-lead", "engines/ray/schedule.py",
           "if step.takes or step.trains:",
           "if step.trains:",
           (f"{PARTS}::test_rollouts_lead_and_what_takes_or_trains_does_not",)),
    Mutant("the-average-with-the-critic", "engines/ray/placement.py",
           'if name in ("student", "ema"))',
           'if name in ("student",))',
           (f"{PARTS}::test_teacher_critic_and_head_live_together_and_the_average_with_the_student",)),
    Mutant("several-errors-become-letters", "errors.py",
           "return type(self), (self.errors,)",
           "return type(self), self.args",
           (f"{PARTS}::test_several_errors_stay_several_between_processes",)),
    Mutant("work-across-a-checkpoint", "engines/ray/driver.py",
           "if self._cut(iteration + 1):",
           "if self._cut(iteration + 1) and not rest:",
           (f"{GROUPS}::test_no_work_is_begun_across_a_checkpoint",)),
    Mutant("nobody-sleeps", "engines/ray/driver.py",
           'self._workers[self._awake].call("sleep") if self._awake else {}',
           "{}",
           (f"{GROUPS}::test_of_groups_that_take_turns_one_sleeps",)),
)
