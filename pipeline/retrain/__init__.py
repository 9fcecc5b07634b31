"""The retraining job: snapshot, data, train, evaluate, export, promote."""
