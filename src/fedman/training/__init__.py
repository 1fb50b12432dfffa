"""One round of federated learning: who takes part, local steps, aggregation, evaluation."""
