"""A run's curves where a team already looks: JSONL, TensorBoard, Weights & Biases, MLflow."""
