"""What users run as a whole: batches and data generation, each a thin layer over the queue."""
