"""The next character in Shakespeare's plays, whose 99 speakers are the clients; a small LSTM, a few rounds."""

import numpy as np

import fedman
from fedman.models.text import LSTM

if __name__ == "__main__":
    plays = fedman.data.load("shakespeare")
    result = fedman.run(
        dataset=plays,
        model=LSTM(plays.shape, plays.classes, hidden=[64]),
        optimizer=fedman.Adam(),
        lr=0.02,
        participation=0.05,
        cohort="fixed",
        rounds=5,
        epochs=1,
        batch_size=10,
        eval_every=5,
    )
    print(result)
    counts = np.bincount(plays.y_test[plays.y_test >= 0])
    always, learnt = 100 * counts.max() / counts.sum(), result.summary["accuracy"]["cloud"]
    print(f"the model predicts {learnt:.1f} % of all characters; a space everywhere is right in {always:.1f} %")
