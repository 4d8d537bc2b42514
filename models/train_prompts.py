"""The prompts of the card's samples, fixed before training, and the sampling settings the file recommends."""

PROMPTS = ["Once upon a time", "Once upon a time there was a little girl who", "There was once a king who had three sons.",
           "The fox and the crow", "One day a little boy named Tom went into the forest.", "In a small village by the sea",
           "A long time ago, when animals could talk,", "The old woman opened the door and saw", "\"Where are you going?\" asked the rabbit.",
           "It was a cold winter night, and"]
SAMPLING = dict(temp=0.7, top_p=0.95, top_k=0, min_p=0.05, penalty_repeat=1.0)
