"""Workers on a Ray cluster: Ray places and watches them, and carries calls. Weights go over a weight link."""
