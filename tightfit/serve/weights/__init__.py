"""The kinds of weight matrices that a step multiplies by, joined where they have the same input."""
