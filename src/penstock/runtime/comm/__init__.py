"""Messages between ranks: the protocol, and its transports."""
