"""Where the local work of a round is carried out."""
