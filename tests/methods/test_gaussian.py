"""Methods where everything is known: the teacher is exact for N(mean, std^2), the student starts elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fewstep.data.api import Items
from fewstep.data.batches import BatchSource
from fewstep.data.order import BatchOrder
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import AveragedRole, Role, freeze
from fewstep.methods.api import Method
from fewstep.methods.consistency import Consistency, ConsistencySection, euler_step, interval
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.sid import SiD, SiDSection
from fewstep.models.codec import IdentityCodec, IdentitySection
from fewstep.models.discriminator import Discriminator
from fewstep.optim.ema import EMA, EMASection
from fewstep.optim.optimizer import OptimizerSection, RoleOptimizer
from fewstep.optim.schedule import ScheduleSection
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep
from tests.methods.gaussian import GaussianTeacher, new_affine_model

MEAN, STD = 0.4, 0.5
SHAPE = (1, 1, 8, 8)
BATCH = 64
ITERATIONS, CRITIC_UPDATES = 60, 2
LR, CRITIC_LR, DECAY = 4e-3, 1e-2, 0.85
CPU = torch.device("cpu")


class GaussianData:
    """Pixels around the middle of their range, a tenth of it wide: neither end nor step of the range matters."""

    classes = ("all",)
    shape = SHAPE

    def __init__(self, seed: int, num: int = 1024):
        generator = torch.Generator().manual_seed(seed)
        drawn = 127.5 + 25.5 * torch.randn(num, *SHAPE, generator=generator)
        self.pixels = drawn.round().clamp(0, 255).to(torch.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        index = torch.as_tensor(ids)
        return Items(self.pixels[index], torch.zeros(len(index), dtype=torch.int64))


CODEC = IdentityCodec(IdentitySection(mean=(-MEAN * 0.2 / STD,), std=(0.2 / STD,)))
"""What makes x0 of those pixels N(mean, std^2)."""


def dmd2(gan: GANSection | None) -> DMD2:
    return DMD2(DMD2Section(critic_updates=CRITIC_UPDATES, gan=gan), FewStep((1.0,), "renoise", SHAPE))


def sid() -> SiD:
    return SiD(SiDSection(critic_updates=CRITIC_UPDATES), FewStep((1.0,), "renoise", SHAPE))


def engine(method: Method, iterations: int = ITERATIONS, lr: float = LR, seed: int = 0) -> ProcessEngine:
    """A student and a critic with weights of their own, which know nothing of the teacher."""
    networks = {"student": new_affine_model(seed), "critic": new_affine_model(seed + 100)}
    roles = {name: Role(name, network, torch.float32) for name, network in networks.items() if name in method.roles}
    roles["teacher"] = Role("teacher", freeze(GaussianTeacher(MEAN, STD), CPU, torch.float32), torch.float32)
    if "discriminator" in method.roles:
        head = Discriminator(networks["critic"].width)
        head.initialise(torch.Generator().manual_seed(seed))
        roles["discriminator"] = Role("discriminator", head, torch.float32)
    optimizers = {}
    for name in method.trained:
        rate, total = (lr, iterations) if name == "student" else (CRITIC_LR, CRITIC_UPDATES * iterations)
        section = OptimizerSection(lr=rate, betas=(0.0, 0.99), weight_decay=0.0)
        schedule = ScheduleSection(name="cosine", constant=0.4, final=0.01)
        optimizers[name] = RoleOptimizer(roles[name].parameters(), section, schedule, total)
    data = GaussianData(seed)
    source = BatchSource(
        data,
        BatchOrder(seed, len(data), BATCH, method.num_batches),
        CODEC.encode,
        lambda labels: (labels, labels),
        CPU,
    )
    average = EMA(roles["student"].parameters(), EMASection(decay=DECAY))
    roles["ema"] = AveragedRole(roles["student"], average)
    return ProcessEngine(method, roles, optimizers, average, source, seed=seed)


def moments(made: ProcessEngine) -> tuple[float, float]:
    """Mean and standard deviation of 256 one-step samples of the average, 64 elements each."""
    draw = Draw(seed=99, phase="test", iteration=0, key=torch.arange(256))
    with torch.no_grad(), made.ema.swapped():
        x0 = FewStep((1.0,), "renoise", SHAPE).sample(made.roles["student"], None, None, draw).x0
    return x0.mean().item(), x0.std().item()


def test_the_teacher_is_exact():
    """Its velocity is the expectation of noise - x0 over all x0 that lead to x_t, here by summing them up."""
    x0 = torch.linspace(MEAN - 9 * STD, MEAN + 9 * STD, 20_001, dtype=torch.float64)
    for sigma in (0.05, 0.3, 0.9, 1.0):
        for x_t in (-1.3, 0.2, 2.0):
            noise = (x_t - (1 - sigma) * x0) / sigma
            likelihood = torch.softmax(-(((x0 - MEAN) / STD) ** 2) / 2 - noise**2 / 2, 0)
            expected = (likelihood * (noise - x0)).sum()
            found = GaussianTeacher(MEAN, STD).velocity(
                torch.full((1, 1, 1, 1, 1), x_t, dtype=torch.float64), torch.full((1, 1), sigma).double(), None
            )
            torch.testing.assert_close(found.squeeze(), expected, rtol=1e-6, atol=1e-9)


def test_the_real_data_are_those_of_the_teacher():
    x0 = CODEC.encode(GaussianData(0).pixels)
    assert (x0.mean().item(), x0.std().item()) == pytest.approx((MEAN, STD), rel=0.01)


@pytest.mark.parametrize(
    "method",
    [dmd2(None), dmd2(GANSection(student_weight=0.1, discriminator_weight=0.1)), sid()],
    ids=["dmd2", "dmd2 with the adversarial term", "sid"],
)
def test_a_one_step_student_reaches_the_mean_and_the_deviation_of_the_teacher(method):
    made = engine(method)
    start = moments(made)
    assert abs(start[0] - MEAN) > 0.2 * MEAN
    assert abs(start[1] - STD) > 0.2 * STD
    for iteration in range(ITERATIONS):
        made.run(iteration)
    mean, std = moments(made)
    assert mean == pytest.approx(MEAN, rel=0.05)
    assert std == pytest.approx(STD, rel=0.05)


def endpoint_of_euler(nodes: int) -> tuple[float, float]:
    """Mean and standard deviation that so many steps of the teacher make of noise; the whole path is affine."""
    teacher, x = GaussianTeacher(MEAN, STD), torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1, 1)
    levels, _, steps = interval(torch.arange(nodes, dtype=torch.float32), nodes, 1.0)
    for sigma, dt in zip(levels.double(), steps.double(), strict=True):
        x = euler_step(x, teacher.velocity(x, sigma.expand(2, 1), None), dt.expand(2, 1))
    origin, unit = x.flatten().tolist()
    return origin, unit - origin


def test_consistency_makes_one_step_of_the_student_as_good_as_all_steps_of_the_teacher():
    """It ends where the teacher's own grid ends, which is not yet the data."""
    section = ConsistencySection(nodes=4, shift=1.0, guidance_scale=1.0)
    made = engine(Consistency(section), iterations=150, lr=1e-2)
    mean, std = endpoint_of_euler(4)
    assert std < 0.7 * STD
    assert abs(moments(made)[1] - std) > 0.5 * std
    for iteration in range(150):
        made.run(iteration)
    assert moments(made) == (pytest.approx(mean, rel=0.06), pytest.approx(std, rel=0.06))
