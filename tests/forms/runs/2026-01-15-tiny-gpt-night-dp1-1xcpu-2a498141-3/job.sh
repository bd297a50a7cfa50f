# campaign-1-node-3
