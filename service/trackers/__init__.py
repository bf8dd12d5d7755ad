"""Export a run's curves to experiment trackers: JSONL, TensorBoard, W&B, Trackio and MLflow."""
