"""The paper's figures."""

from fedman.paper import targets as paper


def test_the_papers_figures():
    """A few cells as printed; every table has all of its 36."""
    assert paper.target("cifar100", "dir0.3", "fedavg", False) == paper.Target(40.90, 0.62, None)
    assert paper.target("cifar100", "iid", "feddc", True) == paper.Target(56.77, 0.31, 156)
    assert paper.target("tiny-imagenet", "dir0.6", "fedspeed", True) == paper.Target(35.49, 0.07, 78)
    assert paper.target("cifar10", "dir0.6", "feddc", False) == paper.Target(83.10, 0.37, None)
    assert paper.sharpness("cifar100", "dir0.3", "fedsam", True) == paper.Sharpness(29.29, 2709)
    assert "copy" in paper.sharpness("cifar100", "dir0.6", "feddc", True).doubt
    assert paper.target("cifar100", "dir0.3", "scaffold", False) is None
    assert paper.target("digits", "dir0.3", "fedavg", False) is None
    for dataset in ("cifar100", "tiny-imagenet", "cifar10"):
        cells = [
            paper.target(dataset, p, a, man)
            for p in ("dir0.3", "dir0.6", "iid")
            for a in ("fedavg", "fedsam", "fedasam", "feddyn", "feddc", "fedspeed")
            for man in (False, True)
        ]
        assert all(cell and 20 < cell.accuracy < 90 for cell in cells)
