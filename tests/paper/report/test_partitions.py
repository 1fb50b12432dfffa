"""Figures of partitions without the images."""

import numpy as np

from fedman.data import SPECS, partition


def test_partition_pictures_need_no_images():
    """The table of counts depends on the class sizes alone, whatever the order of the samples."""
    labels = np.repeat(np.arange(20), 50)
    shuffled = np.random.default_rng(0).permutation(labels)
    for spec, name in (("dir0.3", "cifar100"), ("dir0.6", "cifar10"), ("iid", "cifar100")):
        counts = [
            partition.table(y, partition.split(y, spec, 10, classes=20, iid=SPECS[name].iid), 20)
            for y in (labels, shuffled)
        ]
        assert (counts[0] == counts[1]).all()
