"""Export a run's curves to JSONL, TensorBoard, W&B, Trackio and MLflow."""
