"""Work queues: jobs that one worker does, and the consumer that takes them."""
