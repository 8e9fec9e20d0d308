"""What a training step leaves behind for people: the record of each sample, its writer, pictures, the rollout log."""
