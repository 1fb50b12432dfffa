"""Terms added to a client's loss. MAN, the mean squared activation of every layer, is the one of the paper."""
