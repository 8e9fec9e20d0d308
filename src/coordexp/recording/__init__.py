"""Files about single samples of a training run: rollout records, the rollout log, TensorBoard's pictures."""
