"""The learner's side of rollout servers: client, payloads, connections, weight pushes, and the backend over them."""
