"""Model compression layer by layer: its cost is predicted before it begins, its error measured when it is done."""
