# campaign-1-node-2
