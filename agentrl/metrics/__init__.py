"""What a run tells about itself: numbers of batches and evaluations, where they go, and what becomes of them at the end.

catalogue   every metric: name, definition, unit, denominator      batch        numbers of one training batch
evaluation  rows and numbers of one evaluation                     sinks        metrics.jsonl and the trackers
console     the live display                                       history      a run's files, read back
summary     summary.json                                           report       report.html and curves.png
"""
