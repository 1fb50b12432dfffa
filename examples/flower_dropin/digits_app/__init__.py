"""An ordinary Flower app: a small network learns handwritten digits that are spread over the nodes."""
