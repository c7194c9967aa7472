"""Many replicas as one service: pools of engines behind a gateway, that come, go, crash and slow down."""
