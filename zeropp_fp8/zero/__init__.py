"""ZeRO-3 with this project's collectives: the layer between DeepSpeed's stage 3 and `comm/`."""
