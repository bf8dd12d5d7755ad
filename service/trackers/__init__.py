"""A run's curves where a team already looks: JSONL, TensorBoard, W&B, Trackio, MLflow."""
