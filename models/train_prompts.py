"""The prompts of the report, fixed before training, and the sampling settings the file recommends."""

PROMPTS = ["Once upon a time", "The old clockmaker opened the door and saw", "There was once a king who had three sons."]
SAMPLING = dict(temp=1.0, top_p=0.95, top_k=0, min_p=0.05, penalty_repeat=1.05)
