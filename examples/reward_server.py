"""A reward service in 30 lines. In a recipe: `reward: grpc://localhost:50051`.

Run `python reward_server.py 50051`; `rolemesh reward check grpc://localhost:50051` tries it.
Behind the port may stand the address to listen on: 0.0.0.0 in a container, for others to reach it.
Without rolemesh: `pip install grpcio-tools`, then in a copy of the folder protos/
`python -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. rolemesh/v1/*.proto`.
"""

import sys
from concurrent import futures

import grpc

from rolemesh.v1 import reward_pb2, reward_pb2_grpc


def judge(trajectory):
    """The reward of one trajectory: any finite number."""
    return 1.0 if trajectory.completion.strip() == trajectory.answer else 0.0


class RewardServer(reward_pb2_grpc.RewardServiceServicer):
    """Judges trajectories that come with the call."""

    def ComputeReward(self, request, context):
        """Answers with one reward a trajectory, in the same order."""
        if not request.trajectories.trajectories:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "send trajectories")
        rewards = [judge(trajectory) for trajectory in request.trajectories.trajectories]
        yield reward_pb2.ComputeRewardResponse(rewards=reward_pb2.Rewards(rewards=rewards))


if __name__ == "__main__":
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServer(), server)
    host = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"
    port = server.add_insecure_port(f"{host}:{sys.argv[1]}")
    server.start()
    print(f"grpc://{host}:{port}", flush=True)
    server.wait_for_termination()
