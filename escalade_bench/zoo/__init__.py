"""Networks and layers that only measurements use."""
