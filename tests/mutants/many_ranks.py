"""Mutants of what makes large runs fit: idle roles that sleep, saving beside training, tokens cut over ranks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# fmt: off
OFFLOAD = (
    Mutant("sleeper-holds-its-memory", "engines/offload.py",
           "            storage.resize_(0)\n",
           "            pass\n",
           ("engines/test_offload.py::"
            "test_a_tensor_wakes_as_the_same_object_with_the_same_bits_and_held_nothing_meanwhile",)),
    Mutant("sleeper-wakes-with-other-values", "engines/offload.py",
           "_values(storage).copy_(place, non_blocking=True)",
           "_values(storage).zero_()",
           ("engines/test_offload.py::"
            "test_a_tensor_wakes_as_the_same_object_with_the_same_bits_and_held_nothing_meanwhile",)),
    Mutant("places-overlap", "engines/offload.py",
           "strict=True) for place in slab.split(run)]",
           "strict=True) for place in [slab] * len(run)]",
           ("engines/test_offload.py::test_values_lie_in_slabs_that_are_kept_from_one_sleep_to_the_next",)),
    Mutant("value-of-a-view-is-that-of-its-storage", "engines/offload.py",
           "tensor.element_size() + int(tensor.storage_offset())",
           "tensor.element_size()",
           ("engines/test_offload.py::test_views_of_one_storage_sleep_once_and_stay_views_of_it",)),
    Mutant("wakes-before-others-sleep", "engines/offload.py",
           "    for name in sleepers.keys() - wanted - left:\n        sleepers[name].sleep()\n"
           "    for name in wanted:\n        sleepers[name].wake()\n",
           "    for name in wanted:\n        sleepers[name].wake()\n"
           "    for name in sleepers.keys() - wanted - left:\n        sleepers[name].sleep()\n",
           ("engines/test_offload.py::test_those_that_are_not_wanted_go_to_sleep_before_the_others_wake",)),
    Mutant("all-stay-awake", "engines/process.py",
           "keep_awake(self.sleepers, names, perhaps=perhaps)",
           "keep_awake(self.sleepers, self.sleepers)",
           ("engines/test_offload.py::test_in_a_phase_nothing_is_awake_but_what_it_uses",)),
    Mutant("called-asleep", "engines/roles.py",
           "        self.weights.wake()\n        return self.network(features)",
           "        return self.network(features)",
           ("engines/test_offload.py::test_a_role_that_is_asleep_wakes_when_it_is_called",)),
)

BESIDE = (
    Mutant("writer-reads-live-weights", "checkpoint/background.py",
           'copy = whole.detach().to("cpu", copy=True)',
           'copy = whole.detach().to("cpu")',
           ("checkpoint/test_background.py::test_training_goes_on_while_the_values_of_before_are_written",)),
    Mutant("training-waits-for-the-writer", "checkpoint/background.py",
           "        self._writer.start()\n",
           "        self._writer.start()\n        self._writer.join(timeout=5)\n"
           "        assert not self._writer.is_alive()\n",
           ("checkpoint/test_background.py::test_training_goes_on_while_the_values_of_before_are_written",)),
    Mutant("two-writers-at-once", "checkpoint/background.py",
           "            return\n        self.wait()\n",
           "            return\n",
           ("checkpoint/test_background.py::"
            "test_the_next_save_waits_for_the_one_before_and_old_ones_are_removed",)),
    Mutant("error-of-the-writer-lost", "checkpoint/background.py",
           "            self._error = error\n",
           "            pass\n",
           ("checkpoint/test_background.py::"
            "test_a_full_disk_is_the_same_error_once_and_costs_no_older_checkpoint",)),
    Mutant("error-of-the-writer-told-at-the-end", "train.py",
           "                saver.check()\n",
           "",
           ("test_train.py::test_an_error_while_a_checkpoint_is_written_ends_the_run_at_the_next_iteration",)),
    Mutant("run-ends-before-its-checkpoint-is-written", "checkpoint/background.py",
           "        if kind is None:\n            self.wait()\n",
           "        if kind is None:\n            pass\n",
           ("checkpoint/test_background.py::test_an_error_that_nobody_asked_for_is_raised_at_the_end",)),
)

DIVIDED = "engines/test_sequence.py::test_two_ranks_that_share_the_tokens_of_all_rows_equal_one_process"
SEQUENCE = (
    Mutant("gradient-of-shared-tokens-too-small", "engines/sequence.py",
           "return ctx.division.own(gradients[0], ctx.axis) * ctx.division.ranks, None, None",
           "return ctx.division.own(gradients[0], ctx.axis), None, None",
           (f"{DIVIDED}[sft]",)),
    Mutant("gradient-to-the-input-is-that-of-a-part", "engines/sequence.py",
           "return ctx.division.gathered(gradients[0], ctx.axis) / ctx.division.ranks, None, None",
           "return ctx.division.gathered(gradients[0], ctx.axis), None, None",
           (f"{DIVIDED}[dmd2_fresh_gan]",)),
    Mutant("tokens-of-frames-mixed", "engines/sequence.py",
           "self._exchanged(sent).movedim(0, 2).flatten(1, 3)",
           "self._exchanged(sent).movedim(0, 1).flatten(1, 3)",
           (f"{DIVIDED}[teacher_forcing]",)),
    Mutant("heads-come-back-in-another-order", "engines/sequence.py",
           "self._exchanged(sent).movedim(0, 3).flatten(3, 4).flatten(1, 2)",
           "self._exchanged(sent).movedim(0, 4).flatten(3, 4).flatten(1, 2)",
           (f"{DIVIDED}[sft]",)),
    Mutant("positions-of-another-rank", "models/wan/model.py",
           "sight = sight._replace(turn=self._own_turn(sight.turn, tokens.shape[1]))",
           "sight = sight._replace(turn=Rotation(*(t[: tokens[0, :, :, 0].numel()] for t in sight.turn)))",
           (f"{DIVIDED}[sft]",)),
    Mutant("ranks-of-a-row-read-rows-of-their-own", "engines/mesh.py",
           "return self.rank // sequence, self.world // sequence",
           "return self.rank % (self.world // sequence), self.world // sequence",
           ("engines/test_sequence.py::test_four_ranks_two_for_each_row_equal_one_process",)),
    Mutant("carry-with-the-heads-of-one-rank", "engines/process.py",
           'return name.startswith("history.")',
           "return False",
           (f"{DIVIDED}[streams]",)),
    Mutant("heads-that-cannot-be-shared-not-refused", "misfits.py",
           'for what, count in (("heads", shape.heads), ("tokens in a frame", tokens)):',
           'for what, count in (("tokens in a frame", tokens),):',
           ("engines/test_sequence.py::test_what_ranks_cannot_share_is_refused_before_anything_is_loaded",)),
    Mutant("rollouts-gather-at-every-call", "engines/shards.py",
           "module.set_reshard_after_forward(False, recurse=False)",
           "module.set_reshard_after_forward(True, recurse=False)",
           ("engines/test_shards.py::test_what_a_call_gathers_stays_whole_inside_and_is_parts_again_afterwards",)),
)

# fmt: on

MANY_RANKS: tuple[Mutant, ...] = (*OFFLOAD, *BESIDE, *SEQUENCE)
