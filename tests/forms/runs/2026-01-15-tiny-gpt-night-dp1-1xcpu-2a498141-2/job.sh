# campaign-1-node-4
