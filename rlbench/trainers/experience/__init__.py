"""Experience: samples, rewards, shaping, advantages, replay."""
