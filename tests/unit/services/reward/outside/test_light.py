import subprocess
import sys


def test_clients_of_outside_rewards_bring_no_torch():
    program = (
        "import sys, rolemesh.services.reward.outside.make\n"
        "heavy = {'torch', 'transformers', 'vllm', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'brought {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
