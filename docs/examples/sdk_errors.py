"""What can go wrong has a type."""

from triforce_core.client import InvalidRequestError, OverloadedError, TriForceClient, UnavailableError

with TriForceClient("127.0.0.1:9000", retries=5, timeout_s=60) as client:
    print("healthy" if client.health() else "not healthy")
    try:
        print(client.generate("def main():", temperature=-1).text)
    except InvalidRequestError as error:  # names the field, the value and the rule
        print(error)
    except (OverloadedError, UnavailableError):  # after five more attempts
        print("try again later")
