"""The main job shown on real parts: six lives, and a coordinator killed in the middle of them."""
