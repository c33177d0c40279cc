"""What a run shows of itself: metrics, trackers, the progress line, warnings and the report."""
