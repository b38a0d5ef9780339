"""Plans: how a run is spread and what it saves on, found by counting memory and time; nothing here imports torch."""
