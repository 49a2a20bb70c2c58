"""The gateway: programs of users ask the model that is trained, by OpenAI's protocol, and each token is recorded."""
