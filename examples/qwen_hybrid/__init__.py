"""A hybrid decoder: gated delta nets, full attention in every fourth layer, experts in each."""
