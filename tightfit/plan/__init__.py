"""Plans: layout and levers of a run, found by predicting memory and time; nothing here imports torch."""
