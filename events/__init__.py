"""What has happened: facts in the past tense, and their form on the wire."""
