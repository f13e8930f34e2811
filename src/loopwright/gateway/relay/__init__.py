"""The relay: engines that connect out to the gateway by WebSocket."""
