"""The memory that models, engines and activations take on a device, computed from configurations."""
