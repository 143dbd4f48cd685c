"""Chats of rollouts: messages to tokens and back (`session`, renderers), and the server for agents (`app`)."""
