"""What lies where, as arithmetic without torch: ranks, families of models, parameters, boxes."""
