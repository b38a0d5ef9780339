"""Methods that choose codes and scales of a layer's weights."""
