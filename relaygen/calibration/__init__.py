"""From recorded traces to the cues of a policy: pure functions over iterables.

The cues and sentence ends are found by the very matchers that find them online.
"""
