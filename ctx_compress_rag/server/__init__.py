"""An OpenAI-compatible server, whose one process owns model and store; its clients send markers or questions."""
