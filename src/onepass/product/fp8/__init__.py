"""Products of linear layers in eight bits: their scales, and what graphs and other ops see of them."""
