"""What each device type needs and is: the CPU device module, and facts about Trainium."""
