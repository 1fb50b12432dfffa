"""How S models are evaluated at once on one device, and what they need there: CUDA graphs, transfers."""
