"""The target: prompts, rollouts, and the signals a drafter learns from."""
