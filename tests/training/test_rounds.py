"""The engine: chunks, images and augmentation, screening, stopping, evaluation."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedman.algorithms import ALGORITHMS, hyperparameters
from fedman.backends.in_process import STEP, default_chunk
from fedman.data.augment import PAD, Windows, gather, normalise
from fedman.errors import Diverged
from fedman.execution.executor import Stopped
from fedman.models import build
from fedman.training.aggregate import Trained, weighted_sum
from fedman.training.batches import Samples
from fedman.training.randomness import plan
from fedman.training.settings import Training
from tests.cases import CASES
from tests.federations import COHORTS, TRAINING, Loop, network, play, samples, simulation, together

CPU = torch.device("cpu")


def images(sizes=(12, 7, 9, 10), size=12, classes=3) -> Samples:
    generator = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x = torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, classes, (n,), generator=generator)
    parts = [part.numpy() for part in torch.randperm(n, generator=generator).split(list(sizes))]
    return Samples(x, y, x, y, parts, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), True)


def convnet():
    torch.manual_seed(0)
    return build("small_cnn", (3, 12, 12), 3).double()


@pytest.mark.parametrize("case", CASES)
def test_chunks_agree_on_augmented_images(case):
    """One client at a time, two, or all at once: the same models to rounding."""
    name, hyper = CASES[case]
    training = Training(zeta=0.3, lr=0.1, clip=0.5, epochs=2, batch_size=6, seed=1)
    cohorts = [[0, 1, 3], [2, 3]]
    results = []
    for chunk in (1, 2, 3):
        machine = simulation(name, hyper, training=training, chunk=chunk, model=convnet(), data=images())
        state, outcomes = play(machine, cohorts)
        results.append((state.server["w"], outcomes[-1].loss, list(outcomes[-1].penalty.values())))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-12)


def test_the_result_does_not_depend_on_the_number_of_cores():
    training = Training(zeta=0.3, epochs=1, batch_size=5)
    before, bits = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            machine = simulation("feddc", training=training, model=convnet(), data=images())
            state, _ = play(machine, [[0, 1, 2, 3], [1, 2]])
            bits.append((state.server["w"], machine.evaluate(state.sel["w"], batch=7)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits[0][0], bits[1][0])
    assert bits[0][1] == bits[1][1]


def test_windows_are_mirrored_padded_crops():
    data = images()
    drawn = plan(5, 2, [0, 2], [12, 9], 2, 5, CPU, pad=PAD)
    own = data.index([0, 2], drawn.longest)
    x = normalise(data.x[own], data.mean, data.std, torch.float64)
    windows = Windows(x, images=True, augment=True)
    moved = 0
    for j in range(drawn.sample.shape[1]):
        batch = windows.take(drawn.sample[:, j], drawn.window[:, :, j])
        where = own.gather(1, drawn.sample[:, j])
        straight = gather(data.x, where, drawn.window[:, :, j], data.mean, data.std, torch.float64)
        assert torch.equal(batch, straight.movedim(-1, -3))
        for s in range(2):
            for b in range(drawn.counts[s][j]):
                mirror, down, right = drawn.window[:, s, j, b].tolist()
                image = x[s, drawn.sample[s, j, b]].permute(2, 0, 1)
                image = image.flip(-1) if mirror else image
                image = nn.functional.pad(image, (PAD,) * 4)[:, down : down + 12, right : right + 12]
                assert torch.equal(batch[s, b], image)
                moved += (down, right) != (PAD, PAD)
    assert moved > 5


@pytest.mark.parametrize("x", [torch.randn(20, 4), torch.arange(60).reshape(20, 3)])
def test_samples_that_are_no_images_are_read_where_they_lie(x):
    index, sample = torch.tensor([[3, 5, 7], [8, 0, 1]]), torch.tensor([[2, 0], [1, 1]])
    windows = Windows(normalise(x[index], (), (), torch.float64), images=False, augment=False)
    found = gather(x, index.gather(1, sample), None, (), (), torch.float64)
    assert found.dtype == (torch.float64 if x.is_floating_point() else torch.int64)
    assert torch.equal(found, windows.take(sample, torch.empty(0)))


def test_normalisation():
    x = torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8)
    want = (torch.tensor([0.0, 1.0, 0.2]).double() - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.3, 0.25])
    torch.testing.assert_close(
        normalise(x, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), torch.float64)[0, 0, 0], want, rtol=1e-6, atol=1e-6
    )
    rows = torch.tensor([[1.5, -2.0]])
    assert torch.equal(normalise(rows, (9.0,), (9.0,), torch.float64), rows.double())


class Poisoned(nn.Module):
    """Returns NaN for clients whose inputs hold a marker value."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x) + torch.where(x == 1e6, torch.nan, 0.0).sum()


@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("case", CASES)
def test_a_non_finite_client_is_left_out_and_named(case, chunk):
    """The round's result, memories included, is the one of the others."""
    name, hyper = CASES[case]
    data = samples()
    data.x[data.parts[2][0], 0] = 1e6
    machine = simulation(name, hyper, data=data, model=Poisoned(), chunk=chunk)
    state, outcomes = play(machine, [[0, 2, 5], [1, 3]])
    clean, without = play(simulation(name, hyper, data=data, model=Poisoned(), chunk=chunk), [[0, 5], [1, 3]])
    assert [o.quarantined for o in outcomes] == [[2], []]
    assert [o.quarantined for o in without] == [[], []]
    assert outcomes[0].cohort == [0, 2, 5]
    torch.testing.assert_close(state.server, clean.server, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.clients.memory, clean.clients.memory, rtol=1e-12, atol=1e-12)
    assert torch.equal(state.clients.last[2], machine.start().clients.last[2])
    assert not state.seen[2]
    assert outcomes[0].loss == pytest.approx(without[0].loss)
    assert outcomes[0].penalty == pytest.approx(without[0].penalty)


class Loud(Poisoned):
    """Answers so loudly to the marker that the square is infinite, while the weights stay finite."""

    def forward(self, x):
        return self.inner(x) * (1 + 1e200 * (x == 1e6).to(x.dtype).amax())


def test_a_client_whose_figures_are_not_finite_is_left_out():
    """Else a record would hold an infinity, which is not JSON."""
    data = samples()
    data.x[data.parts[2][0], 0] = 1e6
    plain = replace(TRAINING, zeta=0.0)
    state, outcomes = play(simulation(training=plain, data=data, model=Loud()), [[0, 2, 5]])
    assert outcomes[0].quarantined == [2]
    clean, _ = play(simulation(training=plain, data=data, model=Loud()), [[0, 5]])
    torch.testing.assert_close(state.server, clean.server, rtol=1e-12, atol=1e-12)
    assert all(map(math.isfinite, (outcomes[0].loss, *outcomes[0].penalty.values())))


def test_a_round_without_a_finite_client_diverges_and_changes_nothing():
    machine = simulation("feddc", training=replace(TRAINING, lr=1e200))
    state = machine.start()
    before = {**state.server, **state.clients.memory, "last": state.clients.last.clone()}
    with pytest.raises(Diverged, match="round 1: the models of all 3 clients are not finite"):
        machine.round(state, COHORTS[0])
    assert state.round == 0
    assert all(
        torch.equal(v, {**state.server, **state.clients.memory, "last": state.clients.last}[k])
        for k, v in before.items()
    )


def test_a_round_notes_its_rate_and_who_took_part():
    state, outcomes = play(simulation(), COHORTS[:2])
    assert [o.lr for o in outcomes] == [TRAINING.lr * TRAINING.lr_decay**t for t in (0, 1)]
    assert [k for k, seen in enumerate(state.seen) if seen] == sorted({*COHORTS[0], *COHORTS[1]})
    assert play(simulation(), COHORTS[:1])[0].seen == [k in COHORTS[0] for k in range(6)]


def test_stopping_leaves_the_state_of_the_last_round():
    machine = simulation("feddyn")
    state = machine.start()
    machine.round(state, COHORTS[0])
    last = state.clients.last.clone()
    machine.backend.executor.stopping.set()
    with pytest.raises(Stopped):
        machine.round(state, COHORTS[1])
    assert state.round == 1
    assert torch.equal(state.clients.last, last)


def test_evaluation_counts_every_sample_once():
    machine = simulation()
    w = machine.start().server["w"]
    out = network()(machine.federation.samples.x_test)
    accuracy = 100 * (out.argmax(-1) == machine.federation.samples.y_test).double().mean().item()
    loss = nn.functional.cross_entropy(out, machine.federation.samples.y_test).item()
    for batch in (1, 3, 100):
        assert machine.evaluate(w, batch) == pytest.approx((accuracy, loss))


def test_all_is_the_mean_of_everyones_last_model():
    for name in ("fedavg", "feddyn"):
        machine = simulation(name)
        state, _ = play(machine)
        share = machine.federation.relative_size if name == "fedavg" else torch.ones(6).double()
        want = (share[:, None] * state.clients.last).sum(0) / share.sum()
        torch.testing.assert_close(machine.federation.models(state)["all"], want, rtol=1e-12, atol=1e-12)


def test_recorded_loss_is_the_mean_over_steps_before_each_update():
    """With a rate of zero the model never moves: the loss is that of the start on the client's own samples."""
    still = replace(TRAINING, lr=1e-300, weight_decay=0.0, batch_size=13)
    for name in ALGORITHMS:
        _, outcomes = play(simulation(name, training=still), [[0]])
        data = samples()
        own = data.parts[0]
        loss = nn.functional.cross_entropy(network()(data.x[own]), data.y[own]).item()
        assert outcomes[0].loss == pytest.approx(loss)
        hidden = torch.relu(network().linears[0](data.x[own])).square().mean().item()
        assert outcomes[0].penalty["relus.0"] == pytest.approx(hidden)
        assert list(outcomes[0].penalty) == ["relus.0", "output"]


def test_weighted_sum_is_in_float64_and_in_order():
    rows = torch.tensor([[1.0, 2.0], [3.0, 5.0], [1e-12, 0.0]])
    assert weighted_sum(rows, [1.0, 3.0, 1.0]).tolist() == [10.0 + float(rows[2, 0]), 17.0]


def test_default_chunk():
    assert default_chunk(200_000, CPU) == 1
    assert default_chunk(1_000, CPU) > 1
    assert default_chunk(200_000, torch.device("cuda")) > 1


def test_float32_follows_float64():
    a = simulation("fedspeed", {"alpha": 0.3, "rho": 0.2})
    data = samples()
    single = replace(data, x=data.x.float(), x_test=data.x_test.float())
    b = simulation("fedspeed", {"alpha": 0.3, "rho": 0.2}, model=network().float(), data=single, precision="fp32")
    torch.testing.assert_close(play(b)[0].server["w"].double(), play(a)[0].server["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True], ids=["own cohorts", "one cohort"])
@pytest.mark.parametrize("case", CASES)
def test_stacked_runs_are_the_separate_runs(case, shared):
    """Three runs with other seeds, ζ, partitions and numbers of the algorithm in one chunk: each ends where it ends
    alone.

    Where graphs are captured, chunks of cohorts that differ in size are filled up to few sizes.
    """
    name, hyper = CASES[case]
    given = {**hyperparameters(ALGORITHMS[name]), **hyper}
    other = {k: v if isinstance(v, bool) else 0.7 * v for k, v in given.items()}
    variants = [
        (hyper, replace(TRAINING, seed=1), samples()),
        (hyper, replace(TRAINING, seed=2, zeta=0.0), samples()),
        (other, TRAINING, samples([14, 6, 19, 10, 15, 6])),
    ]
    schedules = [COHORTS[:2] if shared else (COHORTS[i:] + COHORTS[:i])[:3] for i in range(3)]
    alone = [
        play(simulation(name, h, training=t, data=d), cohorts)[0].server["w"]
        for (h, t, d), cohorts in zip(variants, schedules, strict=True)
    ]
    for loop in (None, Loop()):
        runs = [simulation(name, h, training=t, data=d, longest=20, graphs=loop) for h, t, d in variants]
        states = [run.start() for run in runs]
        for cohorts in zip(*schedules, strict=True):
            together(runs, states, cohorts)
        for state, w in zip(states, alone, strict=True):
            torch.testing.assert_close(state.server["w"], w, rtol=1e-11, atol=1e-12)
        if loop:
            sizes = {sum(map(len, cohorts)) for cohorts in zip(*schedules, strict=True)}
            assert set(loop.sizes) == {n if shared else n + -n % STEP for n in sizes}


@pytest.mark.parametrize("cohort", [[5], [1, 3], [0, 2, 5]])
def test_plans_longer_than_a_client_change_nothing(cohort):
    """Where all plans have one shape (as a captured graph wants), the steps a client does not have move nothing."""
    short, long = simulation("feddyn"), simulation("feddyn", longest=50)
    a, b = play(short, [cohort])[0], play(long, [cohort])[0]
    torch.testing.assert_close(a.server, b.server, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a.clients.memory, b.clients.memory, rtol=1e-12, atol=1e-12)


def test_a_run_that_diverges_in_a_stack_leaves_the_others_alone():
    data = samples()
    data.x[0, 0] = 1e6
    clean = replace(data, parts=[data.parts[0][1:], *data.parts[1:]])
    good, bad = (simulation(data=d, model=Poisoned(), longest=20) for d in (clean, data))
    states = [good.start(), bad.start()]
    outcomes = together([good, bad], states, [[0], [0]])
    assert isinstance(outcomes[1], Diverged)
    assert states[1].round == 0
    torch.testing.assert_close(
        states[0].server["w"], play(simulation(data=clean, model=Poisoned()), [[0]])[0].server["w"]
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_entry_that_is_not_finite_marks_its_client(value):
    w = torch.ones(3, 4)
    w[1, 2] = value
    trained = Trained([4, 5, 6], {"w": w, "empty": torch.ones(3, 0)}, {}, None, {"loss": torch.ones(3)})
    assert trained.reports()[:, -1].tolist() == [1, 0, 1]
