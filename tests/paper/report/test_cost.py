"""The paper's count of multiplications."""

from fedman.paper.report import cost


def test_the_papers_count_of_multiplications():
    """57 152 for the hidden layers against 14.7 million; the logits are 100 more."""
    counted = cost.layers("cifar_cnn", (3, 32, 32), 100)
    assert sum(man for _, _, man in counted) == 57_152 + 100
    assert [own for _, own, _ in counted] == [
        64 * 28 * 28 * 3 * 25, 64 * 10 * 10 * 64 * 25, 1600 * 384, 384 * 192, 192 * 100,
    ]  # fmt: skip
